"""Advice: changes of recipe options or model that lower the cost, estimated by Vela."""
