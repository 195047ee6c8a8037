"""Tokenizer, chat templates, stop strings, grammars. No torch."""
