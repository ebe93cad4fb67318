"""The report of an export: delegates, layers, memory over time, as text, data and HTML."""
