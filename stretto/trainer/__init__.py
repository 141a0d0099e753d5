"""Learning: batches of rollouts in, policy versions out. Start with `loop.py`, then `step.py`.

samples.py      rollouts, checked and cut          corrections.py, losses.py    what a token counts
packing.py      micro-batches, shared prefixes     optimizer.py, schedule.py    fp32 masters behind bf16 weights
publishing.py   versions out, beside the next step checkpoint.py                export and resume
mismatch.py     trainer against engine             client.py, stopping.py       the orchestrator, signals
"""
