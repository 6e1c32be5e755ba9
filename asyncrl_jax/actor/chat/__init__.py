"""Conversations as tokens: tokenizers, chat formats, tool calls."""
