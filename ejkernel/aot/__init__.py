"""Compiles operations for devices that are not here, and reads what the compilers say."""

from ejkernel.aot._export import export_checks
from ejkernel.aot._reports import KernelReport, Report, format_table, to_json
from ejkernel.aot._runner import compile
from ejkernel.aot._targets import Target, parse

__all__ = [
    "KernelReport",
    "Report",
    "Target",
    "compile",
    "export_checks",
    "format_table",
    "parse",
    "to_json",
]
