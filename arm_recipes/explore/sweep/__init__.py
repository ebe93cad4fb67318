"""``sweep``: compile one model for many Ethos-U configurations and compare their estimates."""
