"""`twinop doctor`: `facts` looks at the machine, `checks` judges what it found, `command` shows that."""
