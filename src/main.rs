#[global_allocator]
static ALLOCATOR: evenkeel::util::allocator::Reporting = evenkeel::util::allocator::Reporting;

fn main() -> std::process::ExitCode {
    evenkeel::cli::main()
}
