"""Judgement: is a cell's run near enough to one process?"""
