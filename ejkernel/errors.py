"""Exception and warning types of the package."""


class UnsupportedError(NotImplementedError):
    """The call is valid, but the implementation asked for cannot serve it here."""


class UnsupportedGroupError(ExceptionGroup, UnsupportedError):
    """Nobody can serve the call: one `UnsupportedError` for each implementation that was asked."""

    def derive(self, excs):
        return UnsupportedGroupError(self.message, excs)


class SettingsError(ValueError):
    """An `EJKERNEL_*` variable or override has a value that is not allowed."""


class SelectionError(RuntimeError):
    """No tier of the configuration chain gave a configuration for a call."""


class EjkernelWarning(UserWarning):
    """Something worth knowing that does not stop the call."""


class CompilationError(RuntimeError):
    """A device kernel does not compile; the message names kernel, configuration and target."""
