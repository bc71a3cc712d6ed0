//! Models and data sets of the hub, against servers on this machine that speak its protocol. No test connects to another one.

#[path = "../corpus/mod.rs"]
mod corpus;
mod data;
mod doctor;
mod download;
mod launch;
mod server;
