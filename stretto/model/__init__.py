"""The network being trained: Qwen3-MoE, dense Qwen3, Llama and DeepSeek-V3 through one set of blocks.

Knows nothing of RL. Start with `transformer.py`; routing capture and replay are in `router.py` and `moe.py`.
"""
