//! Which sample is consumed when, as a pure function of (seed, consumed count), and the ledger
//! that proves it. Nothing here knows how many ranks there are.
