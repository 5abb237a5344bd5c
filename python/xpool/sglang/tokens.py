# SPDX-License-Identifier: MIT
"""Token ids from outside are those of the vocabulary.

SGLang takes any number as a token id of a prompt, and its scheduler falls over one that the embedding
does not have: one request would end the server, and on a GPU the FFN would be fed with nonsense.
"""

from xpool.sglang import patch


def _validate(original, manager, request, input_ids, *arguments, **options):
    vocabulary = manager.model_config.vocab_size
    for token in input_ids or ():
        if not 0 <= token < vocabulary:
            raise ValueError(f"token id {token} of the prompt is not in the vocabulary of {vocabulary}")
    return original(manager, request, input_ids, *arguments, **options)


def hook():
    patch.around("sglang.srt.managers.tokenizer_manager", "TokenizerManager._validate_one_request", _validate)
