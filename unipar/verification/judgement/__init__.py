"""Judgement: is the difference between a cell's run and one process within its tolerance?"""
