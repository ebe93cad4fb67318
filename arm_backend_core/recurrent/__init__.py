"""Recurrent layers: recognize unrolled steps and roll them into loops over chunks of steps."""
