#!/usr/bin/env python3
"""Seconds from the command to the first step on many hosts: Evenkeel over SSH beside torchrun started by a parallel ssh.

The hosts are network namespaces of this machine with OpenSSH's servers, which need root. In each trial both train the same
PyTorch program on the same hosts, in turns; its record shows the first step that rank 0 has finished. Evenkeel's own trainer
follows, also on more hosts than the program's imports would let this machine start.

    cargo build --release && scripts/hosts.sh
    python3 benches/hosts.py --program target/release/evenkeel --python target/python/bin/python
"""
import argparse, json, os, pathlib, shutil, signal, statistics, subprocess, tempfile, time

p = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
p.add_argument("--program", required=True, help="the program evenkeel")
p.add_argument("--python", required=True, help="a Python with torch")
p.add_argument("--hosts", type=int, default=8, help="hosts that train the PyTorch program")
p.add_argument("--alone", type=int, default=64, help="hosts that Evenkeel's own trainer also uses")
p.add_argument("--trials", type=int, default=3)
a = p.parse_args()

ROOT = pathlib.Path(__file__).resolve().parent.parent
LAB = f"ekb{os.getpid()}"
PORT = "29400"
place = pathlib.Path(tempfile.mkdtemp())
environment = os.environ | {"PATH": f"{place}/bin:{os.environ['PATH']}", "GLOO_SOCKET_IFNAME": "eth0"}


def sh(script):
    subprocess.run(["sh", "-ec", script], check=True)


def address(host):
    return f"10.9.{host // 250}.{host % 250 + 1}"


# The kernel keeps the neighbours of all namespaces in one table, by default at most 1,024.
NEIGHBOURS = [pathlib.Path(f"/proc/sys/net/ipv4/neigh/default/gc_thresh{number}") for number in (3, 2, 1)]
before = [file.read_text() for file in NEIGHBOURS]


def build(hosts):
    """Namespaces with one bridge, and a server in each."""
    for file in NEIGHBOURS:
        file.write_text(str(4 * hosts * hosts + 1024))
    sh(f"""mkdir -p /run/sshd {place}/bin
        ssh-keygen -q -t ed25519 -N '' -f {place}/host
        ssh-keygen -q -t ed25519 -N '' -f {place}/user
        cp {place}/user.pub {place}/authorized
        {{ printf '10.9.* '; cat {place}/host.pub; }} >{place}/known
        ip netns add {LAB}
        ip -n {LAB} link add name lab0 type bridge
        ip -n {LAB} link set dev lab0 up
        ip -n {LAB} link set dev lo up
        ip -n {LAB} addr add 10.9.255.254/16 dev lab0""")
    (place / "ssh.conf").write_text(
        f"IdentityFile {place}/user\nIdentitiesOnly yes\nUserKnownHostsFile {place}/known\nUser root\n")
    (place / "sshd.conf").write_text(
        f"HostKey {place}/host\nAuthorizedKeysFile {place}/authorized\nPidFile none\nStrictModes no\n"
        f"PasswordAuthentication no\nPermitRootLogin yes\nMaxStartups 100\nSetEnv XDG_CACHE_HOME={place}/cache\n")
    (place / "bin/ssh").write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {place}/ssh.conf "$@"\n')
    (place / "bin/ssh").chmod(0o755)
    for host in range(hosts):
        name = f"{LAB}h{host}"
        sh(f"""ip netns add {name}
            ip -n {name} link set dev lo up
            ip link add name v{host} netns {LAB} type veth peer name eth0 netns {name}
            ip -n {LAB} link set dev v{host} master lab0 up
            ip -n {name} addr add {address(host)}/16 dev eth0
            ip -n {name} link set dev eth0 up
            ip netns exec {name} unshare --mount /usr/sbin/sshd -f {place}/sshd.conf""")


def remove(hosts):
    for name in [f"{LAB}h{host}" for host in range(hosts)] + [LAB]:
        script = f"ip netns pids {name} | xargs -r kill -9; ip netns delete {name}"
        subprocess.run(["sh", "-c", script], stderr=subprocess.DEVNULL)
    for file, value in reversed(list(zip(NEIGHBOURS, before))):
        file.write_text(value)
    shutil.rmtree(place)


def inside(command, log):
    return subprocess.Popen(["ip", "netns", "exec", LAB, *command], env=environment, stdout=log, stderr=log,
                            start_new_session=True)


def first_step(commands, has_stepped):
    """Seconds from the start of the commands until rank 0 has finished a step."""
    with open(place / "log", "w") as log:
        begun = time.monotonic()
        running = [inside(command, log) for command in commands]
        while not has_stepped():
            if any(child.poll() not in (None, 0) for child in running) or time.monotonic() - begun > 600:
                raise SystemExit((place / "log").read_text())
            time.sleep(0.01)
        seconds = time.monotonic() - begun
        for child in running:
            child.send_signal(signal.SIGTERM)
        for child in running:
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
        for host in range(max(a.hosts, a.alone)):
            while subprocess.run(["ip", "netns", "pids", f"{LAB}h{host}"], capture_output=True, text=True).stdout.count("\n") > 1:
                time.sleep(0.1)
    return seconds


def program(record, checkpoints, micro, passes):
    return [str(ROOT / "examples/pytorch/train_ddp.py"), f"--per-device-batch-size={micro}",
            f"--gradient-accumulation-steps={passes}", f"--checkpoints={checkpoints}", "--steps=100000",
            f"--record={record}"]


def any_loss(record):
    def has():
        return record.is_dir() and any('"loss"' in path.read_text() for path in record.iterdir())
    return has


def list_of(hosts):
    return "ssh:" + ",".join(address(host) for host in range(hosts))


def by_torchrun(trial):
    record = place / f"torchrun-{trial}"
    words = program(record, place / f"torchrun-{trial}-ckpt", 2, 1)
    commands = []
    for host in range(a.hosts):
        line = [a.python, "-m", "torch.distributed.run", f"--nnodes={a.hosts}", "--nproc-per-node=1", f"--node-rank={host}",
                f"--master-addr={address(0)}", f"--master-port={PORT}", *words]
        line = f"cd {ROOT} && EVENKEEL_GENERATION=1 GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1 " + " ".join(line)
        commands.append(["ssh", "-tt", address(host), line])
    return first_step(commands, any_loss(record))


def by_evenkeel(trial):
    record, out = place / f"evenkeel-{trial}", place / f"run-{trial}"
    recipe = place / "program.json"
    recipe.write_text(json.dumps({"apiVersion": "evenkeel.dev/v1alpha1", "kind": "Recipe", "metadata": {"name": "r"},
        "spec": {"batch": {"global": 2 * a.hosts, "per_device_batch_size": 2}, "trainer": {"resume": ["--resume={checkpoint}"]}}}))
    words = program(record, "{checkpoint_dir}", "{per_device_batch_size}", "{gradient_accumulation_steps}")
    return first_step([[a.program, "launch", recipe, "--on", list_of(a.hosts), "--out", out, "--", a.python, *words,
                        "{resume_args}"]], any_loss(record))


def alone(trial, hosts):
    out, recipe = place / f"own-{hosts}-{trial}", place / "own.json"
    recipe.write_text(json.dumps({"apiVersion": "evenkeel.dev/v1alpha1", "kind": "Recipe", "metadata": {"name": "r"},
        "spec": {"batch": {"global": hosts}, "budget": {"samples": 10 ** 7}, "model": {"init": "random", "config": {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64}},
            "data": {"sequence_length": 32, "train": [{"path": "synthetic", "synthetic": {
                "vocabulary": 64, "branching": 4, "samples": 5000}}]}}}))
    metrics = out / "gen-1/metrics.jsonl"
    stepped = lambda: metrics.is_file() and '"step"' in metrics.read_text()
    return first_step([[a.program, "launch", recipe, "--on", list_of(hosts), "--out", out]], stepped)


hosts = max(a.hosts, a.alone)
try:
    build(hosts)
    alone("copy", hosts)  # copies the program to the hosts, once
    by_torchrun("warm")   # reads torch from the disk
    pairs = []
    for trial in range(a.trials):
        pair = {"torchrun": by_torchrun(trial), "evenkeel": by_evenkeel(trial), "own": alone(trial, a.hosts),
                f"own on {a.alone}": alone(trial, a.alone)}
        print(json.dumps({key: round(value, 2) for key, value in pair.items()}), flush=True)
        pairs.append(pair)
    medians = {key: round(statistics.median(pair[key] for pair in pairs), 2) for key in pairs[0]}
    ratio = statistics.median(pair["evenkeel"] / pair["torchrun"] for pair in pairs)
    print(json.dumps({"median seconds": medians, "evenkeel / torchrun": round(ratio, 3)}))
finally:
    remove(hosts)
