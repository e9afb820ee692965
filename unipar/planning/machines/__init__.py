"""Devices and machines that a plan is made for: their speeds, links and memory."""
