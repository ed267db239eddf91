"""qdsim: federated unlearning with QuickDrop, simulated on Ray.

An experiment is a list of phases; a phase is rounds of ``client_step`` then ``server_step``; both are
plain functions on values. Ray only decides where ``client_step`` runs.

    cli.py           the commands: reads argv, prints, exits
    launch.py        one run from job to run directory: check, place, watch; lock.py: one owner at a time
    storage.py       where runs lie: a path or a URI; arrays.py: numpy arrays in a file
    display.py       the live screen, plain lines, the result table; progress.py: what it is told; pace.py: time left
    status.py        where a run is, in a file; watch.py: status and top, from the files alone
    planner.py       does a job fit, how long will it take: layout.py, estimate.py, footprint.py, measured by probe.py
    config.py        Job: frozen, validated; profiles.py: named sets of overrides; methods.py: what each method can do
    data.py          data sets as uint8 arrays; partition.py: who holds which sample
    models.py        the paper's ConvNet as a function of its parameters; derivatives.py: its gradients, written out;
                     winograd.py: wide convolutions with fewer multiplications; patches.py: the first block, one product
    clients.py       ClientState, its views Z_i; forgetting.py: requests and what they take away
    phases.py        Phase, ClientUpdate, Assignment
    algorithms/      one method a file, in the order of the paper's pseudo-code (torch only)
    federation.py    the round loop; Executor; InlineExecutor
    experiment.py    seeds x methods x requests, worked through on one executor
    checkpoint.py    a commit after every round; trained.py: trained states that any run may take up
    plan.py          what the data allow of a job, resolved for each seed
    hosts.py         who owns client states in a process; evaluation.py: accuracies as counts
    ray_cluster.py   where Ray is started or joined; ray_placement.py: room for actors; ray_jobs.py: submit and stop
    ray_clients.py   ClientActor; ray_crew.py: all of them, started; ray_actors.py: at work, replaced when lost
    ray_executor.py  Executor on top of them; ray_preload.py, imports.py: processes that are ready sooner
    ray_driver.py    DriverActor, and the command's watch over it; ray_metrics.py: gauges; chaos.py: faults on purpose
    tables.py        the result schemas; results.py: the run directory; verify.py: are two runs equal
    summary.py       the result table from the Parquet tables
"""

__version__ = "0.1.0"
