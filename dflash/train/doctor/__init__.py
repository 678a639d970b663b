"""The doctor: what would spoil a run, found before it starts, each finding with its remedy."""

from dflash.records import CheckResult
from dflash.train.doctor.describe import ConfigDescription, describe_config
from dflash.train.doctor.examination import Part, examine
from dflash.train.doctor.preflight import check_devices, require_ready, run_checks
from dflash.train.doctor.report import DoctorReport, render_checks, require_passed

__all__ = [
    "CheckResult",
    "ConfigDescription",
    "DoctorReport",
    "Part",
    "check_devices",
    "describe_config",
    "examine",
    "render_checks",
    "require_passed",
    "require_ready",
    "run_checks",
]
