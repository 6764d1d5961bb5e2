"""A data set on the hub that streams, in place of one of `datasets`."""


class Stream(list):
    """Rows that remember how they were shuffled."""

    def shuffle(self, seed, buffer_size):
        self.seed = seed
        return self

    def set_epoch(self, epoch):
        self.epochs = [*getattr(self, "epochs", []), epoch]
