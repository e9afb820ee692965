"""Small helpers that know nothing of training: text, tables, files, /proc, plugins, seeding."""
