"""Token losses, one small function each, and what they share.

base.py          LossInput -> loss(tokens, settings) -> TokenLoss: one signature for all
policy.py        importance_sampling, ppo, cispo, gspo
off_policy.py    decoupled_ppo, a3po, m2po: trust regions made for stale data
corrections.py   truncated importance sampling, IcePop masking
regularizers.py  KL to a reference model, entropy bonus
aggregation.py   token_mean, sequence_mean, constant: weights that no packing changes
registry.py      names, recipes (grpo, dapo, dr_grpo, gspo), a user's own function from a file
"""
