# SPDX-License-Identifier: MIT
"""A prompt that cannot be served is its sender's mistake, and leaves nothing behind.

SGLang takes any number as a token id, and its scheduler falls over one that the embedding does not
have: one request would end the server, and on a GPU the FFN would be fed with nonsense. The same holds for
what is asked of log-probabilities, for token ids that are held back at the beginning, and for numbers that
are none. It makes as many requests of one as `n` says before it looks at anything, and takes all memory for
that. And it keeps the state of a request that it has refused, for which an ordered end then waits for ever.
"""

from contextlib import aclosing

from xpool.sglang import patch

# Bits of SGLang's tensors for them.
_INTEGERS = {"max_new_tokens": 32, "min_new_tokens": 32, "top_k": 32, "sampling_seed": 64}
_MOST_BIAS = 1e30  # far beyond any use, and a float32
MOST_CHOICES = 128  # as OpenAI, and our native Instances


def _check_choices(request):
    parameters = getattr(request, "sampling_params", None)
    for one in parameters if isinstance(parameters, list) else [parameters]:
        count = one.get("n", 1) if isinstance(one, dict) else 1
        if type(count) is not int or not 1 <= count <= MOST_CHOICES:
            raise ValueError(f"n is {count!r}; allowed is a number from 1 to {MOST_CHOICES}")


def _check_ids(ids, vocabulary, what):
    for token in ids or ():
        if not isinstance(token, int) or not 0 <= token < vocabulary:
            raise ValueError(f"token id {token!r} of {what} is not in the vocabulary of {vocabulary}")


def _check_number(request, name, least, most):
    value = getattr(request, name)
    if not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} is {value!r}; allowed is a number from {least} to {most}")


def _check_sampling(parameters, vocabulary):
    """SGLang compares with limits, where 1.5 is as good as 1, and looks at some not at all."""
    for name, bits in _INTEGERS.items():
        value = parameters.get(name)
        if value is not None and not (isinstance(value, int) and -1 << bits - 1 <= value < 1 << bits - 1):
            raise ValueError(f"{name} is {value!r}; allowed is a whole number of {bits} bits")
    bias = parameters.get("logit_bias") or {}
    values = bias.values() if isinstance(bias, dict) else [bias]
    if not all(isinstance(value, (int, float)) and abs(value) <= _MOST_BIAS for value in values):
        raise ValueError(f"logit_bias has values that are no numbers up to {_MOST_BIAS:g}")
    if parameters.get("min_new_tokens"):
        _check_ids(parameters.get("stop_token_ids"), vocabulary, "stop_token_ids")


def _validate(original, manager, request, input_ids, *arguments, **options):
    vocabulary = manager.model_config.vocab_size
    if input_ids is not None and len(input_ids) == 0:
        raise ValueError("the prompt has no tokens")
    _check_ids(input_ids, vocabulary, "the prompt")
    if getattr(request, "return_logprob", False):
        _check_ids(request.token_ids_logprob, vocabulary, "token_ids_logprob")
        _check_number(request, "top_logprobs_num", 0, vocabulary)
        _check_number(request, "logprob_start_len", -1, manager.context_len)
    _check_sampling(getattr(request, "sampling_params", None) or {}, vocabulary)
    return original(manager, request, input_ids, *arguments, **options)


async def _generate(original, manager, request, *arguments, **options):
    _check_choices(request)
    try:
        async with aclosing(original(manager, request, *arguments, **options)) as answers:
            async for answer in answers:
                yield answer
    except ValueError:
        ids = request.rid if isinstance(request.rid, list) else [request.rid]
        for one in ids:
            manager.rid_to_state.pop(one, None)
        raise


def hook():
    manager = ("sglang.srt.managers.tokenizer_manager", "TokenizerManager")
    patch.around(manager[0], f"{manager[1]}._validate_one_request", _validate)
    patch.around(manager[0], f"{manager[1]}.generate_request", _generate)
