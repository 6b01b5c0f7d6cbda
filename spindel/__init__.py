"""Durable structured concurrency for Trio."""
