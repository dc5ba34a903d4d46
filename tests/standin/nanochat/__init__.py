"""A stand-in for a nanochat checkout. It has the names that the package needs, and its own code behind them."""
