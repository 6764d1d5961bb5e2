"""Networks that several tasks train, in plain torch."""
