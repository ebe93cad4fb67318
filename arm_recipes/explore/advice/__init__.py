"""Advice that is measured: what Vela expects of a program that is compiled in another way."""
