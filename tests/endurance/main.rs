//! Runs of the real binary that train for seconds to minutes and are disturbed meanwhile (`cargo
//! test --test endurance`).

mod adapters;
mod bucket;
mod determinism;
mod disk;
mod disturbed;
mod external_trainers;
mod families;
mod hosts;
mod in_place;
mod lab;
mod launchers;
mod losses;
mod measured;
mod memory;
mod parsers;
mod preferences;
mod proxy;
mod readmes;
mod refused;
mod s3;
mod signals;
mod slurm;
mod slurm_lab;
mod ssh_lab;
mod stalled;
mod support;
mod templates;
mod trainers;
mod upstream;
mod verbs;
