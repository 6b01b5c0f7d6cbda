"""Durable facts."""
