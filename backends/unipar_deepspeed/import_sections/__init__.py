"""Parts of importing a ds_config.json: its keys, its precision, and sections on compilation and tensors."""
