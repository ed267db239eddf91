"""qdsim: federated unlearning with QuickDrop, simulated on Ray.

An experiment is a list of phases; a phase is rounds of ``client_step`` then ``server_step``; both are
plain functions on values. Ray only decides where ``client_step`` runs.

    cli.py           run | show | jobs: reads argv, prints, exits
    launch.py        one run from job to run directory: check, place, watch
    display.py       the live screen, plain lines, the result table
    config.py        Job: frozen, validated; profiles.py: named sets of overrides
    data.py          data sets as uint8 arrays; partition.py: who holds which sample
    models.py        the paper's ConvNet as a function of its parameters
    clients.py       ClientState, its views Z_i; forgetting.py: requests and what they take away
    phases.py        Phase, ClientUpdate, Assignment
    algorithms/      one method a file, in the order of the paper's pseudo-code (torch only)
    federation.py    the round loop; Executor; InlineExecutor
    experiment.py    seeds x methods x requests, worked through on one executor
    plan.py          what the data allow of a job, resolved for each seed
    hosts.py         who owns client states in a process; evaluation.py: accuracies as counts
    ray_cluster.py   where Ray is started or joined, and who fits where
    ray_clients.py   ClientActor; ray_driver.py: DriverActor, RayExecutor
    tables.py        the result schemas; results.py: the run directory
    summary.py       the result table from the Parquet tables
"""

__version__ = "0.1.0"
