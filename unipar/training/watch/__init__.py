"""Guard of an ordinary run: every `every` steps it checks that the ranks and the optimizer did what they should."""
