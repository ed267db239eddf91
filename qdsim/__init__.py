"""qdsim: federated unlearning with QuickDrop, simulated on Ray.

An experiment is a list of phases; a phase is rounds of ``client_step`` then ``server_step``; both are plain functions
on values. Ray only decides where ``client_step`` runs. A package imports only those above it:

    errors, plugins, ranges, seeds, clocks
    store/        where runs lie: paths and URIs, arrays in files, the lock, the run directory, its tables
    models/       networks as functions of their parameters; fast/: the ConvNet's derivatives, written out
    data/         data sets, who holds which sample, what a request takes away, what a client owns
    algorithms/   one method a file; the phases, the settings and the registry of methods
    federation/   one round: client hosts, the executor, the round loop, evaluation, membership inference
    experiment/   a job from its file to its rows: settings, plan, runner, commits, stored trainings
    planning/     does a job fit, where are its clients placed, how long will it take
    ray_engine/   clients as Ray actors, the driver, jobs on a cluster
    bench/        what ``qdsim bench`` measures
    cli/          the commands, and all that a person sees
"""

__version__ = "0.1.0"
