"""Exception and warning types of the package."""


class UnsupportedError(NotImplementedError):
    """The call is valid, but the requested implementation cannot serve it on this device."""


class UnsupportedGroupError(ExceptionGroup, UnsupportedError):
    """No implementation can serve the call; holds one `UnsupportedError` for each of them."""

    def derive(self, excs):
        return UnsupportedGroupError(self.message, excs)


class SettingsError(ValueError):
    """An `EJKERNEL_*` variable or override has a value that is not allowed."""


class SelectionError(RuntimeError):
    """No source of configurations had one for a call; the message lists what each answered."""


class EjkernelWarning(UserWarning):
    """The call continues, but its caller should know about this."""


class CompilationError(RuntimeError):
    """A device kernel does not compile; the message names kernel, configuration and target."""
