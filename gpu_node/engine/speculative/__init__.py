"""Speculative decoding: drafts, how many tokens to draft, and what drafted tokens cost."""
