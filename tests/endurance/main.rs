//! Runs of the real binary that train for seconds to minutes and are disturbed meanwhile
//! (`cargo test --features endurance`).

mod disturbed;
mod measured;
mod support;
mod upstream;
