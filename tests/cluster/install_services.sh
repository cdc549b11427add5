#!/bin/sh
# Install Slurm and etcd for tests/cluster, on Debian and as root: 30 MB, half a minute. Elsewhere, say why not; then their tests are skipped.
set -eu
for tool in slurmctld slurmd srun munged etcd; do
  command -v "$tool" >/dev/null || missing="${missing:-} $tool"
done
if [ -z "${missing:-}" ]; then exit 0; fi
why=""
if [ "$(id -u)" != 0 ]; then why="only root can install packages"; fi
if ! command -v apt-get >/dev/null; then why="this system has no apt-get"; fi
if [ -n "$why" ]; then echo "Not installed ($why):$missing. Tests of these skip"; exit 0; fi
echo "Installing Slurm and etcd for the tests ..."
log=$(mktemp)
export DEBIAN_FRONTEND=noninteractive
if { apt-get update && apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge etcd-server; } >"$log" 2>&1; then
  rm -f "$log"
else
  tail -n 5 "$log"; echo "Slurm and etcd could not be installed (see $log): their tests are skipped"
fi
