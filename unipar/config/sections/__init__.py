"""Sections of a config, one file each: batch, model, optimizer, parallel, train."""
