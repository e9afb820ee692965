"""Plans of the recipes in configs/recipes, and of settings whose peak others have published."""
