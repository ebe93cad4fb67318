"""User input: models, sample inputs and calibration data, normalized and validated."""
