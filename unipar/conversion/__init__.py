"""Conversion to scripts for other libraries (`unipar export`) and from their configs (`unipar import`)."""
