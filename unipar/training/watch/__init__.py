"""Guard of an ordinary run: every this many steps it checks that the ranks and the optimizer did what they should."""
