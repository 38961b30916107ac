from tptopk.cli import main

main()
