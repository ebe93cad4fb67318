"""Models, example inputs and calibration samples as users give them."""
