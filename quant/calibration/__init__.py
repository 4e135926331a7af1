"""Calibration: text, what a model's layers see of it, and one decoder layer in memory at a time."""

from __future__ import annotations

from .spec import CalibrationSpec

__all__ = ["CalibrationSpec"]
