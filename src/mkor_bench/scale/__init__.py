"""Predicts the time of a step on many workers, before anybody has them."""
