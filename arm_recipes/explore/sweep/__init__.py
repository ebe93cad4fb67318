"""``sweep``: compile one model for many Ethos-U configurations and Cortex-M processors, and compare the estimates."""
