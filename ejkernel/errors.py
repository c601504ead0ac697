"""Exception and warning types of the package."""


class UnsupportedError(NotImplementedError):
    """The call is valid, but the implementation asked for cannot serve it here."""


class SettingsError(ValueError):
    """An `EJKERNEL_*` variable or override has a value that is not allowed."""


class SelectionError(RuntimeError):
    """No tier of the configuration chain gave a configuration for a call."""


class EjkernelWarning(UserWarning):
    """Something worth knowing that does not stop the call."""
