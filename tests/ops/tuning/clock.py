"""A clock for tests of the tuner, which must not depend on how long anything takes."""


class Clock:
    """Stands in for the `time` module: seconds pass when a test says so.

    Each reading of the clock takes `tick` seconds.
    """

    def __init__(self, tick=0.0):
        self.now, self.tick = 0.0, tick

    def perf_counter(self):
        self.takes(self.tick)
        return self.now

    def takes(self, seconds):
        self.now += seconds
