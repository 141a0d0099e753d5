"""Learning: batches of rollouts in, policy versions out. Start with `loop.py`, then `step.py`.

samples.py, payloads.py   rollouts, fetched, checked and cut    corrections.py, losses.py   what a token counts
packing.py                micro-batches, shared prefixes        optimizer.py, schedule.py   fp32 masters, learning rate
learner.py                a step, without the network           guard.py, shadow.py         slower steps, other policies
publishing.py             versions out, beside the next step    checkpoint.py, resume.py    export, and going on
agreement.py, alarms.py   trainer against engine, every step    mismatch.py                 the same, without replay
replay.py                 a run's batches again                 client.py, stopping.py      the orchestrator, signals
"""
