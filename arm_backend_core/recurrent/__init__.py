"""Recurrent layers: their unrolled steps, and loops over chunks of these."""
