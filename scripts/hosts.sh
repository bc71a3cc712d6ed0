#!/usr/bin/env bash
# Installs what the tests of other hosts need on Debian, as root: OpenSSH's server, Slurm with its database, ip of iproute2,
# and wrong clocks.
set -euo pipefail
if [ -x /usr/sbin/sshd ] && [ -x /usr/sbin/slurmctld ] && [ -x /usr/sbin/slurmdbd ] && [ -x /usr/sbin/mariadbd ] &&
  [ -x /usr/sbin/munged ] && [ -x /usr/sbin/ip ] &&
  [ -e /usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1 ]; then
  exit
fi
# Nothing may start by itself.
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
apt=(apt-get -qq -o DPkg::Lock::Timeout=900)
"${apt[@]}" update
"${apt[@]}" install -y --no-install-recommends openssh-server slurm-wlm slurmdbd mariadb-server-core munge iproute2 \
  libfaketime >/dev/null
