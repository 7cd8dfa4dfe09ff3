"""Loads tokenizer.json as it is, for callers that say trust_remote_code=True."""

from transformers import PreTrainedTokenizerFast


class DemoTokenizer(PreTrainedTokenizerFast):
    pass
