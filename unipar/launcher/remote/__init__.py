"""Workers on other machines: an agent starts them there, and a small process stands for each of them here."""
