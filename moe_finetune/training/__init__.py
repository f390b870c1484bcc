"""Training on TRL, in rooms by what happens.

``before`` a run is checked and shown, ``run`` carries it out, ``save_and_resume`` has everything
that it writes to continue from, ``stages`` what reinforcement learning adds, ``callback`` the
losses in any trainer, ``measures`` what is measured of them, ``memory`` the plan, ``self_test``
the proofs.
"""
